"""Decides which processes of a job are replaced, by which other one, and how often.

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
from tensorwire.launch.dealt import Dealt
from tensorwire.launch.keeper import Keeper, KeeperError, make_pair
from tensorwire.launch.process import Process, Replaceable
from tensorwire.launch.spec import JobSpec, Patience
from tensorwire.launch.takeovers import PassedSlices

# Until there is the first standby, in times of `Patience.standby_s`: since all workers have joined
# the job, and since they were started where they do not join.
_FIRST, _JOINING = 2, 4
# How often in a row a standby that ended by itself is started again.
_STANDBY_TRIES = 3


@dataclass
class _Member:
    """One server or worker through all of its processes.

    Attributes:
        arguments: a server's options, which every successor gets too.
        keeper: of its process, and of every successor.
        term: how often it was replaced.
        restarts: how often of these because a process had died.
        deaths: in a row without progress between them, or for memory.
        reached: its progress at the last death.
        successor: a server's process that is to take over, until it has.
        until: when it must have.
        overdue: whether it was killed because it had not.
    """

    arguments: list[str]
    keeper: Keeper = field(default_factory=Keeper)
    term: int = 0
    restarts: int = 0
    deaths: int = 0
    reached: int = 0
    successor: Process | None = None
    until: float | None = None
    overdue: bool = False


class _Arrival(NamedTuple):
    """A worker that something else has started, its socket, and its first message."""

    worker: Replaceable
    socket: socket.socket
    told: dict[str, Any]


class _Grant:
    """Members of a process that has ended are given to a successor, which is to be started or came.

    Args:
        process: that has ended.
        members: what the successor gets, by their numbers.
        came: the successor, where something else has started it.
        to: the successor, where it is a server that runs.
    """

    successor: Process

    def __init__(
        self,
        process: Replaceable,
        members: dict[int, _Member],
        came: _Arrival | None = None,
        to: Process | None = None,
    ) -> None:
        self.process, self.members, self.came = process, members, came
        if to is not None:
            self.successor = to
        self.starts = came is None and to is None

    @property
    def member(self) -> _Member:
        """The only one, or any."""
        return next(iter(self.members.values()))


class Restarts:
    """The members of one job that can be replaced, and the standby. Without any it does nothing.

    Args:
        job: that is run.
        patience: times.
        start: starts a standby, and lets it inherit sockets.
        start_worker: starts a worker again: its rank, a descriptor that it inherits, its term.
        say: prints a line.
        granted: called with an ended process, its successor, the member's number and its term,
            before the successor is told: it runs by then, and does nothing. Returns True if a
            process has died.

    Attributes:
        dealt: which server has which shares; None: server n has share n.
        takeovers: which worker has which slices; None: killed workers are started again.
    """

    def __init__(
        self,
        job: JobSpec,
        patience: Patience,
        start: Callable[[Sequence[int]], Process],
        start_worker: Callable[[int, int, int], Process],
        say: Callable[[str], None],
        granted: Callable[[Replaceable, Replaceable, int, int], bool] = lambda *_: True,
    ) -> None:
        self._job = job
        self._patience = patience
        self._start = start
        self._start_worker = start_worker
        self._say = say
        self._granted = granted
        self._members: dict[tuple[str, int], _Member] = {}
        self._standby: tuple[Process, list[socket.socket]] | None = None
        self.dealt = Dealt() if job.moves_shares else None
        self._standby_at: float | None = None
        self._standby_deaths = 0
        self._joined = False  # all members, once
        self.takeovers = None if job.restart_workers else PassedSlices(job.places, job.workers)

    def _members_of(self, process: Replaceable) -> dict[int, _Member]:
        """Returns the members that a process is, by number: itself, or the shares of a server."""
        if self.dealt is not None and process.kind == "server":
            shares = self.dealt.shares_of(process.index)
            return {share: self._members["server", share] for share in shares}
        member = self._member_of(process)
        return {} if member is None else {process.index: member}

    def _member_of(self, process: Replaceable) -> _Member | None:
        return self._members.get((process.kind, process.index))

    # --- members --------------------------------------------------------------------------------

    def add(
        self, kind: str, index: int, arguments: Sequence[str] = (), *, joins: bool = False
    ) -> socket.socket:
        """Prepares the start of a member; returns its end of the socket, which the caller closes.

        A member that `joins` a running job may follow another one of that name.
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
        """Returns the keeper of a worker."""
        return self._members["worker", rank].keeper

    def add_share(self, share: int, process: Process, arguments: Sequence[str]) -> Keeper:
        """Makes a running server serve a share that had no server before.

        Raises:
            KeeperError: it cannot be told.
        """
        assert self.dealt is not None
        member = self._members["server", share] = _Member(list(arguments))
        self.dealt.give(share, process, member.keeper)
        member.keeper.hand_over(member.arguments, 0, 0)
        return member.keeper

    def all_taken(self) -> bool:
        """Tells whether every server has read its last message."""
        return all(
            each.keeper.taken for (kind, _), each in self._members.items() if kind == "server"
        )

    def share(self, share: int) -> Keeper:
        """Returns the keeper of a share."""
        return self._members["server", share].keeper

    def expect(self, kind: str, index: int) -> None:
        """Expects a member that something else starts; `admit` lets it in."""
        self._members[kind, index] = _Member([])

    def admit(
        self,
        worker: Replaceable,
        ours: socket.socket,
        told: dict[str, Any],
        former: Replaceable | None,
    ) -> int:
        """Admits an expected worker, or a successor of one, that something else has started.

        Args:
            worker: it.
            ours: the socket to it, owned from now on.
            told: what it gets to know, beside its term.
            former: the process that was that worker before; None: there was none.

        Returns:
            How many processes before it have had its place.

        Raises:
            KeeperError: it cannot be told what it gets.
        """
        member = self._members[worker.kind, worker.index]
        if former is not None and member.keeper.restorable:
            arrival = _Arrival(worker, ours, told)
            self._grant(_Grant(former, {worker.index: member}, arrival))
        else:  # nobody has known a former one
            member.keeper.attach(ours)
            member.keeper.tell({**told, "term": 0})
        return member.term

    def farewell(self, process: Replaceable) -> bool | None:
        """Returns True if a worker left in good order, False if it failed, None if neither."""
        return self._members[process.kind, process.index].keeper.left

    def has_left(self, process: Replaceable) -> bool:
        """Tells whether it is a worker that had left the job in good order."""
        member = self._member_of(process)
        return member is not None and process.kind == "worker" and member.keeper.left is True

    def has_begun(self, process: Replaceable) -> bool:
        """Tells whether a worker has begun to join the job; never with --on-death end."""
        member = self._member_of(process)
        return member is not None and (member.keeper.restorable or member.keeper.left is not None)

    def can_replace(self, process: Replaceable) -> bool:
        """Tells whether a successor could go on in the place of a process that has ended.

        It was killed, or was a server's successor that ended before it had taken over. A process
        that exits with a code has told the others why, and they end too.
        """
        members = self._members_of(process).values()
        try:
            for member in members:
                member.keeper.read_all()
        except KeeperError as error:
            self._say(f"{process.name} cannot be replaced: {error}")
            return False
        if self._is_passed_on(process) and any(each.keeper.offer != "" for each in members):
            return False
        untaken = process.kind == "server" and not all(each.keeper.taken for each in members)
        if not (
            members
            and all(each.keeper.restorable for each in members)
            and (process.killed or untaken)
        ):
            return False
        failpoint("death.noticed")
        return True

    def _is_passed_on(self, process: Replaceable) -> bool:
        """Tells whether other workers get its slices if it is killed, and no worker its place."""
        return process.kind == "worker" and self.takeovers is not None

    def obstacle(self, process: Replaceable) -> str:
        """Returns why the work of a killed worker ends with it, as a phrase, or ""."""
        if self.takeovers is None or process.kind != "worker" or not process.killed:
            return ""
        keeper = self._members["worker", process.index].keeper
        why = "" if keeper.left else self.takeovers.reason_against(keeper)
        return f", and no other worker takes over its slices: {why}" if why else ""

    def pass_on(self, process: Replaceable, living: Sequence[int]) -> str | None:
        """Passes the slices of a killed worker on to workers that live.

        Returns:
            A phrase that follows how it ended; None: nobody is left. "": it is to be replaced.
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
        """Notes the end of a process; returns dead workers whose slices it did not take over."""
        if self.takeovers is None or process.kind != "worker":
            return []
        return self.takeovers.note_end(process.index, living)

    def could_replace(self, process: Replaceable) -> bool:
        """Tells whether a running process, or a standby, would be replaced if killed now."""
        members = self._members_of(process).values()
        if self._is_passed_on(process) and any(each.keeper.offer != "" for each in members):
            return False  # the job would end
        return process.kind == "standby" or (
            bool(members) and all(each.keeper.restorable for each in members)
        )

    def count(self, process: Replaceable) -> bool:
        """Counts the death of a member, and says whether it is replaced once more."""
        for member in self._members_of(process).values():
            reached = member.keeper.progress()
            # A process that ran out of memory once does so again, however far it gets between.
            again = reached <= member.reached or process.died_for_memory
            member.deaths = member.deaths + 1 if again else 1
            member.reached = reached
        if self._deaths(process) > self._job.restarts:
            return False
        failpoint("death.counted")
        return True

    def _deaths(self, process: Replaceable) -> int:
        """Returns the deaths in a row of that member which has the fewest: it got furthest."""
        return min(each.deaths for each in self._members_of(process).values())

    def replace(
        self, process: Process, only: Sequence[int] | None = None, to: Process | None = None
    ) -> tuple[Process, int]:
        """Replaces a member that has ended by a successor.

        Args:
            process: that has ended.
            only: the shares that the successor gets; None: all.
            to: a server that runs, which gets them; None: a successor is started.

        Returns:
            The successor, of a server under the name of a standby so far; and how many processes
            have died there until now. A share that moves is nobody's death.

        Raises:
            OSError: it cannot be started.
            KeeperError: it cannot be told what it gets.
        """
        members = self._members_of(process)
        if only is not None:
            members = {share: members[share] for share in only}
        grant = _Grant(process, members, to=to)
        self._grant(grant)
        return grant.successor, max(each.restarts for each in members.values())

    def _grant(self, grant: _Grant) -> None:
        """Gives the places of members to another process."""
        for member in grant.members.values():
            member.term += 1
        failpoint("term.granted")
        self._start_successor(grant)
        failpoint("successor.started")
        successor = grant.successor if grant.came is None else grant.came.worker
        for number, member in grant.members.items():
            member.restarts += self._granted(grant.process, successor, number, member.term)
        failpoint("grant.noted")
        for member in grant.members.values():
            if grant.came is not None:
                member.keeper.tell({**grant.came.told, "term": member.term})
            member.keeper.hand_over(member.arguments, member.term, member.restarts)
        failpoint("place.handed")

    def _start_successor(self, grant: _Grant) -> None:
        process, member = grant.process, grant.member
        if grant.came is not None:
            member.keeper.attach(grant.came.socket)
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
            member.keeper.attach(ours)
        else:
            self._find_server(grant)

    def _find_server(self, grant: _Grant) -> None:
        if grant.starts:
            grant.successor, sockets = self._take_standby() or self.start_server()
            if self.dealt is None:
                grant.member.keeper.attach(sockets[0])
            else:
                self.dealt.run(grant.process.index, grant.successor, sockets)
        for share, member in grant.members.items():
            if self.dealt is not None:
                self.dealt.give(share, grant.successor, member.keeper)
            member.successor, member.overdue = grant.successor, False
            member.until = time.monotonic() + self._patience.start_s

    def release(self, process: Replaceable) -> None:
        """Closes everything held of an ended member that is not replaced.

        Others check whether its socket is still held, and so learn that no successor comes.
        """
        for member in self._members_of(process).values():
            member.keeper.close()

    def is_successor(self, process: Process) -> bool:
        """Tells whether it has, or had, the place of a server that was killed."""
        return any(member.term > 0 for member in self._members_of(process).values())

    def ending(self, process: Replaceable) -> str:
        """Returns how a member ended, as a phrase that follows its name."""
        if any(member.overdue for member in self._members_of(process).values()):
            return f"did not take over within {self._patience.start_s:g} s"
        return process.ending()

    def history(self, process: Replaceable) -> str:
        """Returns how often a member was replaced, as a phrase that follows its ending."""
        if self._is_passed_on(process):
            return "and no worker is left to go on for it"
        member = next(iter(self._members_of(process).values()))
        times = f"{member.restarts} time{'s' if member.restarts > 1 else ''}"
        if process.died_for_memory:
            return f"after it had been replaced {times}; deaths for memory count despite progress"
        last = "" if member.restarts == self._job.restarts else f", the last {self._job.restarts}"
        return f"after it had been replaced {times}{last} without getting any further"

    # --- the loop -------------------------------------------------------------------------------

    def register(self, poll: select.poll) -> None:
        """Registers the sockets for the poll."""
        for member in self._members.values():
            if (descriptor := member.keeper.descriptor) is not None:
                sending = select.POLLOUT if member.keeper.sending else 0
                poll.register(descriptor, select.POLLIN | sending)

    def times(self) -> Iterator[float]:
        """Yields the times at which `tend` has something to do."""
        if self._standby_at is not None:
            yield self._standby_at
        for member in self._members.values():
            if member.until is not None:
                yield member.until

    def exchange(self, ready: set[int]) -> Iterator[tuple[tuple[str, int], str]]:
        """Reads from the sockets and sends to them; yields members with their mistakes."""
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
                self._standby = self.start_server()
            except OSError as error:
                self._miss_standby(f"cannot be started: {error}")

    # --- the standby ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Plans the first standby for the time after all workers have joined."""
        if self._members:
            self._standby_at = time.monotonic() + _JOINING * self._patience.standby_s

    def note_standby(self, process: Process) -> None:
        """Notes the unexpected end of a standby."""
        if self._standby is not None and self._standby[0] is process:
            _close(self._standby[1])
            self._standby = None
            self._miss_standby(process.ending())

    def retire(self) -> Process | None:
        """Lets go of the standby at the end of the job, and returns it if there is one."""
        self._standby_at = None
        for member in self._members.values():
            member.until = None
        if self._standby is None:
            return None
        (process, sockets), self._standby = self._standby, None
        _close(sockets)
        return process

    def close(self) -> None:
        """Closes all sockets and everything held; may be called again."""
        self.retire()
        for member in self._members.values():
            member.keeper.close()
        if self.dealt is not None:
            self.dealt.close()

    def start_server(self) -> tuple[Process, list[socket.socket]]:
        """Starts a process that waits for its role, with a socket for each share."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            ours, there = [], []
            for _ in range(1 if self.dealt is None else self._job.dealt):
                pair = make_pair()
                ours.append(undo.enter_context(pair[0]))
                there.append(theirs.enter_context(pair[1]).fileno())
            process = self._start(there)
            undo.pop_all()
            return process, ours

    def standby(self) -> Process:
        """Returns the standby; it is started if there is none.

        Raises:
            OSError: it cannot be started.
        """
        if self._standby is None or self._standby[0].has_ended:
            self._standby, self._standby_at = self.start_server(), None
        return self._standby[0]

    def _take_standby(self) -> tuple[Process, list[socket.socket]] | None:
        """Takes the warm standby, unless it has ended; another one will be started later."""
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


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Raises this process's limit of open files to the hard limit for the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the hard limit was lowered meanwhile
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
