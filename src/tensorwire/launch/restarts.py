"""Which servers of a job are replaced, by which process, and how often: the policy.

A server that was killed gets a successor, a process that was started as a standby: a warm one,
which has imported everything beforehand, or one that is started when it is needed. It starts no
process itself and ends none but a successor that does not take over; when the job is in its end,
the supervisor does not ask.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tensorwire.launch.keeper import Keeper, KeeperError, make_pair
from tensorwire.launch.process import Process
from tensorwire.launch.spec import JobSpec, Patience

# A standby that ended by itself is started again, so often in a row.
_STANDBY_TRIES = 3


@dataclass
class _Server:
    """One server through all of its processes.

    Attributes:
        arguments: its options, those of every successor too.
        term: how often it was replaced.
        deaths: in a row without progress between them.
        reached: its progress at the last death.
        successor: the process that is to take over, until it has.
        until: when it must have.
        overdue: whether it was killed because it had not.
    """

    arguments: list[str]
    keeper: Keeper = field(default_factory=Keeper)
    term: int = 0
    deaths: int = 0
    reached: int = 0
    successor: Process | None = None
    until: float | None = None
    overdue: bool = False


class Restarts:
    """The servers of one job that can be replaced, and the standby. Without any it does nothing.

    Args:
        job: that is run.
        patience: times.
        start: starts a standby with a command, and lets it inherit a descriptor.
        say: prints a line.
    """

    def __init__(
        self,
        job: JobSpec,
        patience: Patience,
        start: Callable[[list[str], int], Process],
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._patience = patience
        self._start = start
        self._say = say
        self._servers: dict[int, _Server] = {}
        self._standby: tuple[Process, socket.socket] | None = None
        self._standby_at: float | None = None
        self._standby_deaths = 0

    # --- servers --------------------------------------------------------------------------------

    def add(self, index: int, arguments: list[str]) -> socket.socket:
        """A server is about to start; returns its end of the socket, which the caller closes."""
        server = self._servers[index] = _Server(arguments)
        ours, theirs = make_pair()
        server.keeper.attach(ours)
        return theirs

    def can_replace(self, process: Process) -> bool:
        """Whether a process that has ended is a server whose successor could go on.

        It was killed, or was a successor that ended before it had taken over. One that exits with
        a code has told the workers why, and they end too.
        """
        server = self._server_of(process)
        if server is None:
            return False
        try:
            server.keeper.read_all()
        except KeeperError as error:
            self._say(f"{process.name} cannot be replaced: {error}")
            return False
        killed = process.code is not None and process.code < 0
        return server.keeper.restorable and (killed or not server.keeper.taken)

    def count(self, process: Process) -> bool:
        """Counts the death of a server, and says whether it is replaced once more."""
        server = self._servers[process.index]
        reached = server.keeper.progress()
        server.deaths = 1 if reached > server.reached else server.deaths + 1
        server.reached = reached
        return server.deaths <= self._job.restarts

    def replace(self, process: Process) -> tuple[Process, int]:
        """Has a successor take the place of a server that has ended.

        Returns:
            The successor, which is called a standby so far, and how many there were with it.

        Raises:
            OSError: it cannot be started.
            KeeperError: it cannot be told what it gets.
        """
        server = self._servers[process.index]
        successor, ours = self._take_standby() or self._start_standby()
        server.term += 1
        server.successor, server.overdue = successor, False
        server.until = time.monotonic() + self._patience.start_s
        server.keeper.attach(ours)
        server.keeper.hand_over(server.arguments, server.term)
        return successor, server.term

    def is_successor(self, process: Process) -> bool:
        """Whether it has, or had, the place of a server that was killed."""
        server = self._server_of(process)
        return server is not None and server.term > 0

    def ending(self, process: Process) -> str:
        """How a server ended, as a phrase that follows its name."""
        server = self._server_of(process)
        if server is not None and server.overdue:
            return f"did not take over within {self._patience.start_s:g} s"
        return process.ending()

    def history(self, process: Process) -> str:
        """How often a server was replaced, as a phrase that follows its ending."""
        server = self._servers[process.index]
        times = f"{server.term} time{'s' if server.term > 1 else ''}"
        last = "" if server.term == self._job.restarts else f", the last {self._job.restarts}"
        return f"after it had been replaced {times}{last} without getting any further"

    # --- the loop -------------------------------------------------------------------------------

    def register(self, poll: select.poll) -> None:
        """Adds the sockets to what is waited for."""
        for server in self._servers.values():
            if (descriptor := server.keeper.descriptor) is not None:
                sending = select.POLLOUT if server.keeper.sending else 0
                poll.register(descriptor, select.POLLIN | sending)

    def times(self) -> Iterator[float]:
        """When `tend` has something to do."""
        if self._standby_at is not None:
            yield self._standby_at
        for server in self._servers.values():
            if server.until is not None:
                yield server.until

    def exchange(self, ready: set[int]) -> Iterator[tuple[int, str]]:
        """Reads and sends what the sockets have and take; yields servers with their mistakes."""
        for index, server in self._servers.items():
            if server.keeper.descriptor in ready:
                try:
                    server.keeper.send()
                    server.keeper.read()
                except KeeperError as error:
                    yield index, str(error)

    def tend(self) -> None:
        """Starts a standby if it is time, and ends successors that have not taken over."""
        now = time.monotonic()
        for server in self._servers.values():
            if server.until is not None and now >= server.until:
                server.until = None
                if server.successor is not None and not server.keeper.taken:
                    server.overdue = True
                    server.successor.kill()
        if self._standby_at is not None and now >= self._standby_at:
            self._standby_at = None
            try:
                self._standby = self._start_standby()
            except OSError as error:
                self._miss_standby(f"cannot be started: {error}")

    # --- the standby ----------------------------------------------------------------------------

    def begin(self) -> None:
        """All workers run: from now on there may be a standby."""
        if self._servers:
            self._standby_at = time.monotonic() + self._patience.standby_s

    def note_standby(self, process: Process) -> None:
        """A standby has ended that nobody asked to."""
        if self._standby is not None and self._standby[0] is process:
            self._standby[1].close()
            self._standby = None
            self._miss_standby(process.ending())

    def retire(self) -> Process | None:
        """The job is in its end: lets go of the standby, if there is one, and returns it."""
        self._standby_at = None
        for server in self._servers.values():
            server.until = None
        if self._standby is None:
            return None
        (process, ours), self._standby = self._standby, None
        ours.close()
        return process

    def close(self) -> None:
        """Closes all sockets and all that is held; may be called again."""
        self.retire()
        for server in self._servers.values():
            server.keeper.close()

    def _server_of(self, process: Process) -> _Server | None:
        return self._servers.get(process.index) if process.kind == "server" else None

    def _start_standby(self) -> tuple[Process, socket.socket]:
        ours, theirs = make_pair()
        try:
            with theirs:
                command = self._job.standby_command(theirs.fileno())
                return self._start(command, theirs.fileno()), ours
        except BaseException:
            ours.close()
            raise

    def _take_standby(self) -> tuple[Process, socket.socket] | None:
        """The warm one, unless it has ended; there will be another one later."""
        if self._standby is None or self._standby[0].has_ended:
            return None
        standby, self._standby = self._standby, None
        self._standby_deaths = 0
        self._standby_at = time.monotonic() + self._patience.standby_s
        return standby

    def _miss_standby(self, how: str) -> None:
        self._standby_deaths += 1
        if self._standby_deaths <= _STANDBY_TRIES:
            self._standby_at = time.monotonic() + self._patience.standby_s
        else:
            self._say(
                f"the standby {how}, {self._standby_deaths} times in a row: there is none from now "
                "on; a server that is killed is replaced a little later"
            )


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """A block in which this process may have as many open files as the hard limit says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
