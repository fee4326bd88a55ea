"""Runs the servers of a job whose workers another program starts, and keeps what outlives each.

Workers come to a door and get the settings that `tensorwire run` would give them. One that dies is
waited for: the program that started it starts it again. All else is a `Supervisor`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from tensorwire.errors import UnavailableError
from tensorwire.jobs.door import Door, DoorClient
from tensorwire.jobs.job_log import JOB_LOG
from tensorwire.launch.keeper import KeeperError
from tensorwire.launch.process import Replaceable
from tensorwire.launch.spec import JobSpec
from tensorwire.launch.supervisor import Supervisor
from tensorwire.membership.entry import SUPERVISOR

RETURN_S = 300.0
"""How long a worker that died may be away; Kubernetes waits at most that long between starts."""

# What the workers are told of all that the processes of a job get.
_TOLD = ("SECRET", "SECRET_FILE", "DURABLE", "TRANSPORTS", "IMPORT")


def serve_spec(workers: int, *, options: Sequence[str] = (), **job: Any) -> JobSpec:
    """Makes the spec of such a job; see `JobSpec` for the arguments.

    The typed `options` only name the job for people.

    Raises:
        ValueError: an argument cannot be right.
    """
    if (restarts := job.get("restarts", 3)) < 1:
        raise ValueError(f"restarts is {restarts}; 1 or more are needed where members are replaced")
    if (names := job.get("transports")) is not None and "shm" not in names:
        raise ValueError(
            f"transports are {', '.join(names)}; shm has to be among them, because only what "
            "is in shared memory outlives a process"
        )
    command = ("-m", "tensorwire", "serve", *options)  # nobody knows the command of the workers
    return JobSpec(command, workers, durable=True, **job)


class PlaceQuestion(TypedDict):
    """The message of a worker that comes: which one it is."""

    rank: int


def open_door(path: Path | None, say: Callable[[str], object]) -> Door[PlaceQuestion]:
    """Opens the door at which workers come; its name is there until it is closed.

    Args:
        path: of its socket; None: one in the user's runtime folder.
        say: prints a line where the name cannot be removed.

    Raises:
        UnavailableError: the path is another supervisor's, or cannot be a socket's.
    """
    try:
        return Door(PlaceQuestion, "serve-", path, say=say)
    except OSError as error:
        why = f"tensorwire serve cannot listen at {path}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE and path is not None:
            why = f"another tensorwire serve listens at {path}"
            if not path.is_socket():
                raise UnavailableError(f"{path} is there already, and is no socket") from error
        raise UnavailableError(f"{why}; --socket names another place") from error


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

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

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
        """Stops watching the process."""
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


class ServeSupervisor(Supervisor):
    """The supervisor of one job's servers, which it runs once, for workers that come.

    Invariants: a rank is in one of `_present`, `_left` and, once servers run, `_awaited`.

    Args:
        job: of `serve_spec`.
        socket: where workers come; None: in the user's runtime folder.
        return_s: how long a worker that died may be away, and at the beginning, after the first
            one, the others.
        options: as of `Supervisor`.
    """

    program = "tensorwire serve"

    def __init__(
        self,
        job: JobSpec,
        *,
        socket: Path | None = None,
        return_s: float = RETURN_S,
        **options: Any,
    ) -> None:
        super().__init__(job, **options)
        if not 0 < return_s < float("inf"):
            raise ValueError(
                f"the time for a worker to come back is {return_s:g}, not some seconds"
            )
        self._socket, self._return_s = socket, return_s
        self._is_open = False
        self._present: dict[int, Visitor] = {}
        self._awaited: dict[int, float | None] = {}  # until when; None: for ever
        self._left: set[int] = set()
        self._former: dict[int, Visitor] = {}  # the last process of each worker

    def run(self) -> int:
        """Runs the job; see `Supervisor`.

        Raises:
            UnavailableError: nobody can listen at the socket's path.
        """
        with contextlib.closing(open_door(self._socket, self._say)) as self._door:
            try:
                return super().run()
            finally:
                for visitor in self._present.values():
                    visitor.close()

    # --- for the supervisor ---------------------------------------------------------------------

    def _start_workers(self) -> None:
        """Waits for workers, which come by themselves and may have come already."""
        self._workers_left = 0
        self._awaited = dict.fromkeys(range(self._job.workers))
        for rank in self._awaited:
            self._restarts.expect("worker", rank)
        self._is_open = True
        count = self._job.workers
        who = "a worker joins" if count == 1 else f"{count} workers join"
        self._say(f"{who} by {SUPERVISOR}={self._door.path} and TENSORWIRE_RANK, from 0")

    def _watched(self) -> Iterable[Replaceable]:
        return [*self._running, *self._present.values()]

    @property
    def _has_workers(self) -> bool:
        return len(self._left) < self._job.workers

    def _leave(self) -> None:
        self._is_open = False
        self._door.close()

    def _descriptors(self) -> Iterator[int]:
        if self._is_open:
            yield self._door.descriptor
            yield from (visitor.pidfd for visitor in self._present.values())

    def _times(self) -> Iterator[float]:
        yield from () if self._ending else (at for at in self._awaited.values() if at is not None)

    def _note_mistake(self, kind: str, index: int, text: str) -> None:
        if kind == "worker" and index in self._present:
            place = self._present[index]
            self._fail(f"{place} could not be replaced if it were killed: {text}", 1)
        else:
            super()._note_mistake(kind, index, text)

    def _attend(self, ready: set[int]) -> None:
        if not self._is_open:
            return
        for visitor in list(self._present.values()):
            if self._restarts.farewell(visitor) is not None:
                self._note_farewell(visitor)
            elif visitor.pidfd in ready:
                self._note_gone(visitor)
        for client, question in self._door.messages() if self._door.descriptor in ready else ():
            if question is not None:
                self._answer(client, question["rank"])
        if not (self._ending or any(each.kind == "server" for each in self._running)):
            # Servers end with 0 when all have said goodbye to them, which we may hear later.
            self._left.update(range(self._job.workers))
        now = time.monotonic()
        for rank, until in list(self._awaited.items()):
            if until is not None and now >= until and not self._ending:
                self._miss(rank)

    # --- workers that come and go ---------------------------------------------------------------

    def _answer(self, client: DoorClient, rank: int) -> None:
        holder = self._present.get(rank)
        if holder is not None and holder.has_ended:
            self._note_gone(holder)
            holder = None
        if self._ending:
            reason = "it was ended" if self._failure is None else self._failure[0]
            client.refuse(f"the job is over: {reason}")
        elif not 0 <= rank < self._job.workers:
            last = self._job.workers - 1
            client.refuse(f"it serves workers 0 to {last} (--workers {last + 1})")
        elif holder is not None:
            client.refuse("", holder=holder.pid)
        elif rank in self._left:
            client.refuse("that worker has done its work, and the job waits for the others")
        else:
            self._door.forget(client)
            if (visitor := visitor_of(rank, client)) is None:
                client.channel.close()
            else:
                self._admit(visitor, client)

    def _admit(self, visitor: Visitor, client: DoorClient) -> None:
        former = self._former.get(visitor.index)
        told = {"environment": self._told()}
        try:
            term = self._restarts.admit(visitor, client.channel, told, former)
        except KeeperError as error:
            visitor.close()
            self._fail(f"{visitor} cannot be told what it goes on with: {error}", 1)
            return
        self._present[visitor.index] = self._former[visitor.index] = visitor
        del self._awaited[visitor.index]
        if not term:
            self._note_member(visitor)
        place = f"has come again (restart {term})" if term else "has come"
        self._say(f"{visitor} {place}")
        for rank, until in self._awaited.items():
            if until is None:  # the workers that are there wait for it
                self._awaited[rank] = time.monotonic() + self._return_s

    def _told(self) -> dict[str, str]:
        """Returns the variables for a worker's environment; see docs/internals/launch.md."""
        told = {f"TENSORWIRE_{name}": self._environment.get(f"TENSORWIRE_{name}") for name in _TOLD}
        told["TENSORWIRE_WORKERS"] = str(self._job.workers)
        told["TENSORWIRE_SERVERS"] = ",".join(self._addresses)
        told["TENSORWIRE_SLICES"] = None if self._job.slices is None else str(self._job.slices)
        told[JOB_LOG] = self._log.path
        return {name: value for name, value in told.items() if value}

    def _note_farewell(self, visitor: Visitor) -> None:
        """Notes the farewell of a worker, whose process may go on."""
        self._forget(visitor)
        in_order = self._restarts.farewell(visitor)
        self._restarts.release(visitor)
        if not in_order:
            self._fail(f"{visitor} has failed; its own messages tell why", 1)
            return
        self._left.add(visitor.index)
        if not self._has_workers:
            self._escalation.term_within(self._patience.goodbye_s)  # they end by themselves

    def _note_gone(self, visitor: Visitor) -> None:
        """Notes the end of a worker's process."""
        self._log.add("ended", pid=visitor.pid)
        replaceable = self._restarts.can_replace(visitor)  # reads its last messages
        if self._restarts.farewell(visitor) is not None:
            self._note_farewell(visitor)
            return
        self._forget(visitor)
        if self._ending:
            return
        how = f"{visitor} {visitor.ending()}"
        if not replaceable or self._restarts.count(visitor):
            # One that has kept nothing so far was known to nobody: another one can begin anew.
            self._awaited[visitor.index] = time.monotonic() + self._return_s
            self._say(f"{how}; it may come back within {self._return_s:g} s")
            return
        self._restarts.release(visitor)
        self._died = True
        self._fail(f"{how} {self._restarts.history(visitor)}", 1)

    def _miss(self, rank: int) -> None:
        """Handles a worker that did not come in time."""
        del self._awaited[rank]
        within = f"within {self._return_s:g} s (--return-within)"
        if (former := self._former.get(rank)) is None:
            self._fail(f"worker {rank} did not come {within} after the first one", 1)
            return
        self._restarts.release(former)
        self._died = True
        self._fail(
            f"{former} {former.ending()} and was not started again {within}, as torchrun "
            "--max-restarts or Restart=on-failure would",
            1,
        )

    def _forget(self, visitor: Visitor) -> None:
        del self._present[visitor.index]
        visitor.close()
