"""Places at which a test lets a process end itself or stop: what a kill can leave behind.

`TENSORWIRE_FAIL=server-0:cell.armed:3:kill` lets server 0 kill itself at the third time it reaches
`cell.armed`; `stop` stops it (SIGSTOP), and the test lets it go on. A successor ignores it. Without
the variable a place costs a call.
"""

from __future__ import annotations

import os
import signal
import threading

FAILPOINTS = {
    "opening.described": "a server has noted what workers describe of a store",
    "opening.ready": "it has all regions of the store, and has told nobody",
    "opening.told": "it has told workers that the store is open",
    "version.gathered": "it has the commits of all slices",
    "version.reduced": "the reduced gradient of a first pass is kept",
    "norms.sent": "its sums of squares are at other servers",
    "version.begun": "counts and numbers are noted, and nothing is changed",
    "cell.saved": "a copy of a cell is made and not yet in force",
    "cell.armed": "it is in force, and the cell about to be changed",
    "cell.changed": "the cell is changed, and not yet marked as done",
    "cell.done": "it is marked, and the copy still in force",
    "table.saved": "a copy of rows of a table is made and not yet in force",
    "table.armed": "it is in force, and the rows about to be changed",
    "table.changed": "the rows are changed, and not yet marked as done",
    "version.applied": "all cells and counts have their new values, and nobody knows",
    "version.published": "the version is noted as complete, and nobody is told",
    "version.told": "the workers are told",
    "store.released": "a store is noted as freed, and its regions are there",
    "store.freed": "they are gone",
    "sum.gathered": "a sum of all workers is made, and not noted",
    "sum.noted": "it is noted, and nobody is told",
    "sum.told": "the workers are told",
}
"""What has happened where at a server, in the order of a job."""

WORKER_FAILPOINTS = {
    "part.sent": "a worker has sent its part of a sum",
    "answer.noted": "the result of the sum is noted",
    "position.noted": "its position in the script is noted",
    "gradients.noted": "what another optimizer has is noted, before this one's commit",
    "commit.noted": "a slice's gradients are at all servers and its commit is noted, and not sent",
    "commit.sent": "the commit is at all servers",
    "result.noted": "the result of a version is noted",
}
"""What has happened where at a worker that another process can take the place of."""

_lock = threading.Lock()
_name, _left, _signal = "", 0, signal.SIGKILL


def arm(process: str, text: str) -> None:
    """Makes this process end at the place that a text names, if it names this process.

    Args:
        process: this one, as "server-0".
        text: "process:place:times:kill" or "…:stop"; "" arms nothing.

    Raises:
        ValueError: it makes no sense.
    """
    global _name, _left, _signal
    if not text:
        return
    whose, _, rest = text.partition(":")
    name, _, more = rest.partition(":")
    times, _, action = more.partition(":")
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    places = FAILPOINTS | WORKER_FAILPOINTS
    if name not in places or not times.isdigit() or int(times) < 1 or action not in signals:
        raise ValueError(
            f"TENSORWIRE_FAIL is {text!r}; it is 'server-0:PLACE:TIMES:kill' or '…:stop', with a "
            f"place of {', '.join(places)}"
        )
    if whose == process:
        _name, _left, _signal = name, int(times), signals[action]


def failpoint(name: str) -> None:
    """This process has reached one of these places. Any thread."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), _signal)
