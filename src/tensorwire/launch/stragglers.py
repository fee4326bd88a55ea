"""Finds workers for which the others would wait without end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tensorwire.launch.escalation import passed
from tensorwire.launch.process import Process
from tensorwire.launch.reports import Reports
from tensorwire.launch.restarts import Restarts


class Stragglers:
    """The worker that ended with code 0 before it joined, and failed workers that live on.

    Args:
        restarts: knows who has begun to join.
        reports: of errors that have ended a script.
        stuck_s: for a worker, to end after such an error.
    """

    def __init__(self, restarts: Restarts, reports: Reports, stuck_s: float) -> None:
        self._restarts, self._reports, self._stuck_s = restarts, reports, stuck_s
        self._begun: set[int] = set()  # pids of workers whose keeper is closed
        self._absent: Process | None = None
        self._stuck_at: dict[str, float] = {}

    def note_begun(self, process: Process) -> None:
        """Notes that a worker has begun to join, before its descriptors are forgotten."""
        self._begun.add(process.pid)

    def note_failed(self, name: str) -> None:
        """Notes that an error has ended a worker's script, so that its process should end."""
        self._stuck_at[name] = time.monotonic() + self._stuck_s

    def note_end(self, process: Process) -> None:
        """Notes the end of a process, while its descriptors are still there."""
        begun = process.pid in self._begun or self._restarts.has_begun(process)
        if process.kind == "worker" and process.code == 0 and not begun:
            self._absent = process

    def times(self) -> list[float]:
        """Returns the times to look again."""
        return list(self._stuck_at.values())

    def find(self, workers: Sequence[Process]) -> tuple[str, Process] | None:
        """Returns why the job cannot go on and the worker that is the cause; None: it can go on.

        Args:
            workers: the running ones.
        """
        running = {each.name: each for each in workers}
        self._stuck_at = {name: at for name, at in self._stuck_at.items() if name in running}
        for name in [name for name, at in self._stuck_at.items() if passed(at)]:
            del self._stuck_at[name]
            text = f"raised {self._reports.kind(name)}, and a thread of it may keep it alive"
            return text, running[name]
        if self._absent is None:
            return None
        waiting = next((each for each in workers if self._restarts.has_begun(each)), None)
        if waiting is None:
            return None
        text = f"ended without joining the job, and {waiting} waits for it"
        return f"{text}: every worker has to call tw.init()", self._absent
