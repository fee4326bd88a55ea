"""Which processes of a job are replaced, by which other one, and how often: the policy.

A server that was killed gets a successor, a process that was started as a standby: a warm one,
which has imported everything beforehand, or one that is started when it is needed. The successor of
a worker runs the worker's script, and finds out itself whether it can go on. This module starts no
process itself and ends none but a server's successor that does not take over; when the job is in
its end, the supervisor does not ask.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorwire.failpoints import failpoint
from tensorwire.launch.keeper import Keeper, KeeperError, make_pair
from tensorwire.launch.process import Process
from tensorwire.launch.replaceable import Replaceable
from tensorwire.launch.spec import JobSpec, Patience
from tensorwire.launch.takeovers import PassedSlices
from tensorwire.transitions import GRANT
from tensorwire.walk import Walk

# Until there is the first standby, in times of `Patience.standby_s`: since all workers have joined
# the job, and since they were started where they do not join.
_FIRST, _JOINING = 2, 4
# A standby that ended by itself is started again, so often in a row.
_STANDBY_TRIES = 3


@dataclass
class _Member:
    """One server or worker through all of its processes.

    Attributes:
        arguments: a server's options, those of every successor too.
        term: how often it was replaced.
        deaths: in a row without progress between them.
        reached: its progress at the last death.
        successor: a server's process that is to take over, until it has.
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


class _Arrival(NamedTuple):
    """Something else has started a worker: it, the socket to it, and what it is told first."""

    worker: Replaceable
    socket: socket.socket
    told: dict[str, Any]


class _Grant:
    """The place of a member that has ended is given to a successor: the rows start it, or it came.

    Args:
        process: that has ended.
        member: whose place it is.
        came: the successor, where something else has started it.
    """

    successor: Process

    def __init__(self, process: Replaceable, member: _Member, came: _Arrival | None = None) -> None:
        self.process, self.member, self.came = process, member, came


class Restarts:
    """The members of one job that can be replaced, and the standby. Without any it does nothing.

    Args:
        job: that is run.
        patience: times.
        start: starts a standby with a command, and lets it inherit a descriptor.
        start_worker: starts a worker again: its rank, a descriptor that it inherits, its term.
        say: prints a line.
        granted: is told who takes whose place with which term, before the successor is: it was
            started by then, and does nothing before.

    Attributes:
        takeovers: which worker has which slices; None: those that are killed are started again.
    """

    def __init__(
        self,
        job: JobSpec,
        patience: Patience,
        start: Callable[[list[str], int], Process],
        start_worker: Callable[[int, int, int], Process],
        say: Callable[[str], None],
        granted: Callable[[Replaceable, Replaceable, int], None] = lambda dead, successor, term: (
            None
        ),
    ) -> None:
        self._job = job
        self._patience = patience
        self._start = start
        self._start_worker = start_worker
        self._say = say
        self._granted = granted
        self._members: dict[tuple[str, int], _Member] = {}
        self._standby: tuple[Process, socket.socket] | None = None
        self._standby_at: float | None = None
        self._standby_deaths = 0
        self._grant = self._bind()
        self._joined = False  # all members, once
        self.takeovers = None if job.restart_workers else PassedSlices(job.places, job.workers)

    # --- members --------------------------------------------------------------------------------

    def add(
        self, kind: str, index: int, arguments: Sequence[str] = (), *, joins: bool = False
    ) -> socket.socket:
        """A member is about to start; returns its end of the socket, which the caller closes.

        One that `joins` a job that runs may come after another one of that name.
        """
        if (former := self._members.get((kind, index))) is not None:
            former.keeper.close()
        member = self._members[kind, index] = _Member(list(arguments))
        ours, theirs = make_pair()
        member.keeper.attach(ours)
        if kind == "worker" and self.takeovers is not None and not joins:
            self.takeovers.add(index, member.keeper)
        return theirs

    def keeper(self, rank: int) -> Keeper:
        """What is held of a worker."""
        return self._members["worker", rank].keeper

    def expect(self, kind: str, index: int) -> None:
        """A member will come that something else starts; `admit` lets it in."""
        self._members[kind, index] = _Member([])

    def admit(
        self,
        worker: Replaceable,
        ours: socket.socket,
        told: dict[str, Any],
        former: Replaceable | None,
    ) -> int:
        """Something else has started an expected worker, which is there, or a successor of it.

        Args:
            worker: it.
            ours: the socket to it, owned from now on.
            told: what it gets to know, beside its term.
            former: who was that worker before.

        Returns:
            How many processes before it have had its place.

        Raises:
            KeeperError: it cannot be told what it gets.
        """
        member = self._members[worker.kind, worker.index]
        if former is not None and member.keeper.restorable:
            self._grant(self, _Grant(former, member, _Arrival(worker, ours, told)))
        else:  # nobody has known a former one
            member.keeper.attach(ours)
            member.keeper.tell({**told, "term": 0})
        return member.term

    def farewell(self, process: Replaceable) -> bool | None:
        """Whether a worker has left in good order (true), or has failed (false); None: neither."""
        return self._members[process.kind, process.index].keeper.left

    def has_left(self, process: Replaceable) -> bool:
        """Whether it is a worker that had left the job in good order."""
        member = self._members.get((process.kind, process.index))
        return member is not None and process.kind == "worker" and member.keeper.left is True

    def can_replace(self, process: Replaceable) -> bool:
        """Whether a successor could go on in the place of a process that has ended.

        It was killed, or was a server's successor that ended before it had taken over. One that
        exits with a code has told the others why, and they end too.
        """
        member = self._member_of(process)
        if member is None:
            return False
        try:
            member.keeper.read_all()
        except KeeperError as error:
            self._say(f"{process.name} cannot be replaced: {error}")
            return False
        if self._is_passed_on(process) and member.keeper.offer != "":
            return False
        untaken = process.kind == "server" and not member.keeper.taken
        if not (member.keeper.restorable and (process.killed or untaken)):
            return False
        failpoint("death.noticed")
        return True

    def _is_passed_on(self, process: Replaceable) -> bool:
        """Its slices become another worker's if it is killed; nobody has its place."""
        return process.kind == "worker" and self.takeovers is not None

    def obstacle(self, process: Replaceable) -> str:
        """Why nobody goes on with the work of a worker that was killed, as a phrase, or ""."""
        if self.takeovers is None or process.kind != "worker" or not process.killed:
            return ""
        keeper = self._members["worker", process.index].keeper
        why = "" if keeper.left else self.takeovers.reason_against(keeper)
        return f", and no other worker takes over its slices: {why}" if why else ""

    def pass_on(self, process: Replaceable, living: Sequence[int]) -> str | None:
        """A worker was killed: others that live compute its slices.

        Returns:
            What is to be said behind how it ended; None: nobody is left. "": it is to be replaced.
        """
        if self.takeovers is None or process.kind != "worker":
            return ""
        keeper = self._members["worker", process.index].keeper
        if (given := self.takeovers.pass_on(process.index, living)) is None:
            return None
        ranks, number = given
        who = f"worker {ranks[0]} computes"
        if ranks[1:]:
            who = f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} compute"
        told = f"{who} its slices from now on (takeover {number})"
        if keeper.saving:
            told += f"; the checkpoint that it was writing, {keeper.saving}, may not be there"
        return told

    def note_left(self, process: Replaceable, living: Sequence[int]) -> list[int]:
        """A process has ended; dead workers whose slices it was to take over, and did not."""
        if self.takeovers is None or process.kind != "worker":
            return []
        return self.takeovers.note_end(process.index, living)

    def could_replace(self, process: Replaceable) -> bool:
        """Whether a process that runs would be replaced if it were killed now; a standby, too."""
        member = self._member_of(process)
        if self._is_passed_on(process) and member is not None and member.keeper.offer != "":
            return False  # the job would end
        return process.kind == "standby" or (member is not None and member.keeper.restorable)

    def count(self, process: Replaceable) -> bool:
        """Counts the death of a member, and says whether it is replaced once more."""
        member = self._members[process.kind, process.index]
        reached = member.keeper.progress()
        member.deaths = 1 if reached > member.reached else member.deaths + 1
        member.reached = reached
        if member.deaths > self._job.restarts:
            return False
        failpoint("death.counted")
        return True

    def replace(self, process: Process) -> tuple[Process, int]:
        """Has a successor take the place of a member that has ended.

        Returns:
            The successor, that of a server is called a standby so far; how many there were with it.

        Raises:
            OSError: it cannot be started.
            KeeperError: it cannot be told what it gets.
        """
        grant = _Grant(process, self._members[process.kind, process.index])
        self._grant(self, grant)
        return grant.successor, grant.member.term

    def _bind(self) -> Walk[Restarts, _Grant]:
        return Walk[Restarts, _Grant](
            GRANT,
            {
                "term.granted": Restarts._grant_term,
                "successor.started": Restarts._start_successor,
                "grant.noted": Restarts._note_grant,
                "place.handed": Restarts._hand_over,
            },
        )

    def _grant_term(self, grant: _Grant) -> None:
        grant.member.term += 1

    def _start_successor(self, grant: _Grant) -> None:
        process, member = grant.process, grant.member
        if grant.came is not None:
            ours = grant.came.socket
        elif process.kind == "worker":
            ours, theirs = make_pair()
            with theirs:
                try:
                    grant.successor = self._start_worker(
                        process.index, theirs.fileno(), member.term
                    )
                except BaseException:
                    ours.close()
                    raise
        else:
            grant.successor, ours = self._take_standby() or self._start_standby()
            member.successor, member.overdue = grant.successor, False
            member.until = time.monotonic() + self._patience.start_s
        member.keeper.attach(ours)

    def _note_grant(self, grant: _Grant) -> None:
        successor = grant.successor if grant.came is None else grant.came.worker
        self._granted(grant.process, successor, grant.member.term)

    def _hand_over(self, grant: _Grant) -> None:
        keeper, term = grant.member.keeper, grant.member.term
        if grant.came is not None:
            keeper.tell({**grant.came.told, "term": term})
        keeper.hand_over(grant.member.arguments, term)

    def release(self, process: Replaceable) -> None:
        """A member has ended and is not replaced: closes what is held of it.

        Others look whether its socket is still held, and learn so that nobody comes.
        """
        if (member := self._member_of(process)) is not None:
            member.keeper.close()

    def is_successor(self, process: Process) -> bool:
        """Whether it has, or had, the place of a server that was killed."""
        member = self._member_of(process)
        return member is not None and member.term > 0

    def ending(self, process: Replaceable) -> str:
        """How a member ended, as a phrase that follows its name."""
        member = self._member_of(process)
        if member is not None and member.overdue:
            return f"did not take over within {self._patience.start_s:g} s"
        return process.ending()

    def history(self, process: Replaceable) -> str:
        """How often a member was replaced, as a phrase that follows its ending."""
        member = self._members[process.kind, process.index]
        if self._is_passed_on(process):
            return "and no worker is left to go on for it"
        times = f"{member.term} time{'s' if member.term > 1 else ''}"
        last = "" if member.term == self._job.restarts else f", the last {self._job.restarts}"
        return f"after it had been replaced {times}{last} without getting any further"

    # --- the loop -------------------------------------------------------------------------------

    def register(self, poll: select.poll) -> None:
        """Adds the sockets to what is waited for."""
        for member in self._members.values():
            if (descriptor := member.keeper.descriptor) is not None:
                sending = select.POLLOUT if member.keeper.sending else 0
                poll.register(descriptor, select.POLLIN | sending)

    def times(self) -> Iterator[float]:
        """When `tend` has something to do."""
        if self._standby_at is not None:
            yield self._standby_at
        for member in self._members.values():
            if member.until is not None:
                yield member.until

    def exchange(self, ready: set[int]) -> Iterator[tuple[tuple[str, int], str]]:
        """Reads and sends what the sockets have and take; yields members with their mistakes."""
        for key, member in self._members.items():
            if member.keeper.descriptor in ready:
                try:
                    member.keeper.send()
                    member.keeper.read()
                except KeeperError as error:
                    yield key, str(error)

    def tend(self) -> None:
        """Starts a standby if it is time, and ends successors that have not taken over."""
        now = time.monotonic()
        joined = all(member.keeper.restorable for member in self._members.values())
        if self._standby_at is not None and joined and not self._joined:
            self._joined = True
            self._standby_at = now + _FIRST * self._patience.standby_s
        for member in self._members.values():
            if member.until is not None and now >= member.until:
                member.until = None
                if member.successor is not None and not member.keeper.taken:
                    member.overdue = True
                    member.successor.kill()
        if self._standby_at is not None and now >= self._standby_at:
            self._standby_at = None
            servers = [each for (kind, _), each in self._members.items() if kind == "server"]
            if not any(each.keeper.restorable for each in servers):
                self._standby_at = now + self._patience.standby_s  # nobody could use one so far
                return
            try:
                self._standby = self._start_standby()
            except OSError as error:
                self._miss_standby(f"cannot be started: {error}")

    # --- the standby ----------------------------------------------------------------------------

    def begin(self) -> None:
        """All workers were started: there will be a standby when they have joined, or never do."""
        if self._members:
            self._standby_at = time.monotonic() + _JOINING * self._patience.standby_s

    def note_standby(self, process: Process) -> None:
        """A standby has ended that nobody asked to."""
        if self._standby is not None and self._standby[0] is process:
            self._standby[1].close()
            self._standby = None
            self._miss_standby(process.ending())

    def retire(self) -> Process | None:
        """The job is in its end: lets go of the standby, if there is one, and returns it."""
        self._standby_at = None
        for member in self._members.values():
            member.until = None
        if self._standby is None:
            return None
        (process, ours), self._standby = self._standby, None
        ours.close()
        return process

    def close(self) -> None:
        """Closes all sockets and all that is held; may be called again."""
        self.retire()
        for member in self._members.values():
            member.keeper.close()

    def _member_of(self, process: Replaceable) -> _Member | None:
        return self._members.get((process.kind, process.index))

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
