"""Runs a job of `tensorwire run`, which carries out requests of `tensorwire scale`.

All else is a `Supervisor`'s; scaling.py carries out the requests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tensorwire import failpoints
from tensorwire.errors import UnavailableError
from tensorwire.jobs.secret import job_secret
from tensorwire.launch.process import Process, Replaceable
from tensorwire.launch.scaling import Handler, Scaling
from tensorwire.launch.spec import JobSpec
from tensorwire.launch.supervisor import Supervisor
from tensorwire.launch.worker_count import WorkerCount


class RunSupervisor(Supervisor):
    """The supervisor of one job of `tensorwire run`; see `Supervisor`."""

    def __init__(self, job: JobSpec, **options: Any) -> None:
        super().__init__(job, **options)
        self._worker_count = WorkerCount(job, self._restarts, self, self._say, self._note_line)
        self._scaling = Scaling(self._handlers(), self._reason_against, self._note_line, self._say)

    def _handlers(self) -> Mapping[str, Handler]:
        """Returns the handler of each part of a request."""
        return {"workers": self._worker_count}

    def run(self) -> int:
        """Runs the job; see `Supervisor`."""
        failpoints.arm("launcher", os.environ.get("TENSORWIRE_FAIL", ""))
        with contextlib.closing(self._scaling):
            return super().run()

    def _start_workers(self) -> None:
        try:
            self._scaling.open(job_secret(self._environment))
        except (UnavailableError, OSError) as error:  # the job runs as well
            self._say(f"tensorwire scale will not find this job: {error}")
        super()._start_workers()

    def _descriptors(self) -> Iterable[int]:
        return self._scaling.descriptors()

    def _times(self) -> Iterable[float]:
        return self._scaling.times()

    def _attend(self, ready: set[int]) -> None:
        self._scaling.tend(ready)

    def _leave(self) -> None:
        self._scaling.close()

    # --- for `WorkerCount` ------------------------------------------------------------------------

    def living_workers(self) -> list[Process]:
        """See `Staff`."""
        return self._workers()

    def start_joiner(self, rank: int, joins: int) -> Process:
        """See `Staff`."""
        with self._restarts.add("worker", rank, joins=True) as store:
            return self._start_worker(rank, store.fileno(), joins=joins)

    def _can_lose(self, process: Replaceable) -> bool:
        return super()._can_lose(process) or self._worker_count.joins(process)

    def _note_end(self, process: Process) -> None:
        if self._ending or not self._worker_count.takes_end(process):
            super()._note_end(process)

    def _replace_member(self, process: Process) -> None:
        if not self._worker_count.takes_end(process):
            super()._replace_member(process)

    # --- what is asked ----------------------------------------------------------------------------

    def _note_line(self, what: str, **about: Any) -> None:
        self._log.add(what, **about)

    def _reason_against(self) -> str:
        """Returns why nothing of this job can be changed now; "" if it can."""
        if self._ending:
            return "the job is ending"
        if self._workers_left:
            return "the job is still starting; try again in a moment"
        if not self._has_workers:
            return "the workers of the job have ended"
        return ""
